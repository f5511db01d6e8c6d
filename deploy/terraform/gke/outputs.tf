output "credentials_command" {
  description = "Command that adds the cluster to the kubeconfig."
  value       = "gcloud container clusters get-credentials ${google_container_cluster.this.name} --zone ${var.zone} --project ${var.project}"
}

output "image_registry" {
  description = "REGISTRY for `make images`, and the registry of the image names in platform.yaml and in the overlay."
  value       = "${var.region}-docker.pkg.dev/${var.project}/${google_artifact_registry_repository.images.name}"
}

output "site" {
  description = "Values of site.yaml by key."
  value = {
    "api-servers"      = google_container_cluster.this.private_cluster_config[0].master_ipv4_cidr_block
    "site-network"     = "199.36.153.8/30" # private.googleapis.com (network.tf)
    "s3-endpoint"      = "https://storage.googleapis.com"
    "mlflow-artifacts" = "s3://${google_storage_bucket.artifacts.name}/artifacts"
    "powerscale"       = google_filestore_instance.work.networks[0].ip_addresses[0]
  }
}

output "nfs_path" {
  description = "NFS export of the volume, the prefix of spec.nfs.path in the PersistentVolumes."
  value       = "/${google_filestore_instance.work.file_shares[0].name}"
}

output "mlflow_service_account" {
  description = "Service account of the HMAC key in the secret mlflow-s3."
  value       = google_service_account.mlflow.email
}
