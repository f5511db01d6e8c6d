# Nodes write logs and metrics, and pull the images of one repository.
resource "google_service_account" "nodes" {
  account_id   = "${var.name}-nodes"
  display_name = "Nodes of the cluster ${var.name}"
}

resource "google_project_iam_member" "nodes" {
  project = var.project
  role    = "roles/container.defaultNodeServiceAccount"
  member  = google_service_account.nodes.member
}

resource "google_artifact_registry_repository_iam_member" "nodes" {
  location   = google_artifact_registry_repository.images.location
  repository = google_artifact_registry_repository.images.name
  role       = "roles/artifactregistry.reader"
  member     = google_service_account.nodes.member
}

# MLflow uses the S3 API, whose HMAC key belongs to a service account. Create the key manually (README.md); otherwise it would be in the Terraform state.
resource "google_service_account" "mlflow" {
  account_id   = "${var.name}-mlflow"
  display_name = "Artifacts of MLflow"
}

resource "google_storage_bucket_iam_member" "mlflow" {
  bucket = google_storage_bucket.artifacts.name
  role   = "roles/storage.objectUser"
  member = google_service_account.mlflow.member
}

data "google_project" "this" {
  project_id = var.project
}

# Workload identity: in each team, the service account of the pipeline's pods can read the bucket without a key, through Cloud Storage FUSE volumes and
# Google's clients. tuneline itself uses the S3 API.
resource "google_storage_bucket_iam_member" "teams" {
  for_each = var.teams
  bucket   = google_storage_bucket.artifacts.name
  role     = "roles/storage.objectViewer"
  member   = "principal://iam.googleapis.com/projects/${data.google_project.this.number}/locations/global/workloadIdentityPools/${google_container_cluster.this.workload_identity_config[0].workload_pool}/subject/ns/${each.key}/sa/tuneline"
}
