output "credentials_command" {
  description = "Command that adds the cluster to the kubeconfig."
  value       = "gcloud container clusters get-credentials ${google_container_cluster.this.name} --zone ${var.zone} --project ${var.project}"
}

output "image_registry" {
  description = "REGISTRY of `make images`, and of the image names in platform.yaml and in the overlay."
  value       = "${var.region}-docker.pkg.dev/${var.project}/${google_artifact_registry_repository.images.name}"
}

output "site" {
  description = "Values of site.yaml, by their keys there."
  value = {
    "api-servers"      = google_container_cluster.this.private_cluster_config[0].master_ipv4_cidr_block
    "site-network"     = "199.36.153.8/30" # private.googleapis.com (network.tf)
    "s3-endpoint"      = "https://storage.googleapis.com"
    "mlflow-artifacts" = "s3://${google_storage_bucket.artifacts.name}/artifacts"
    "powerscale"       = google_filestore_instance.work.networks[0].ip_addresses[0]
  }
}

output "nfs_path" {
  description = "Export of the volume: spec.nfs.path of the PersistentVolumes begins with it."
  value       = "/${google_filestore_instance.work.file_shares[0].name}"
}

output "mlflow_service_account" {
  description = "Account for which the HMAC key of the secret mlflow-s3 is made."
  value       = google_service_account.mlflow.email
}
