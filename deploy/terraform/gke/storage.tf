# The volume of platform.yaml. NFS 3 as in components/powerscale-nfs, whose mount options apply here as well.
resource "google_filestore_instance" "work" {
  name                        = "${var.name}-work"
  location                    = var.filestore.tier == "ZONAL" ? var.zone : var.region
  tier                        = var.filestore.tier
  protocol                    = "NFS_V3"
  deletion_protection_enabled = var.deletion_protection

  file_shares {
    name        = "tuneline"
    capacity_gb = var.filestore.capacity_gb
    nfs_export_options {
      ip_ranges   = [google_compute_subnetwork.nodes.ip_cidr_range]
      access_mode = "READ_WRITE"
      squash_mode = "NO_ROOT_SQUASH" # root creates the teams' folders once and changes their owner to the user of site.yaml
    }
  }

  networks {
    network = google_compute_network.this.name
    modes   = ["MODE_IPV4"]
  }
}

# MLflow's artifacts and data, through the S3 API of Cloud Storage.
resource "google_storage_bucket" "artifacts" {
  name                        = "${var.project}-${var.name}"
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  force_destroy               = !var.deletion_protection

  versioning {
    enabled = true
  }
  lifecycle_rule {
    condition {
      num_newer_versions         = 1
      days_since_noncurrent_time = 30 # same retention as MLflow's backups
    }
    action {
      type = "Delete"
    }
  }
  lifecycle_rule {
    condition {
      age = 7
    }
    action {
      type = "AbortIncompleteMultipartUpload"
    }
  }
}

resource "google_artifact_registry_repository" "images" {
  location      = var.region
  repository_id = var.name
  format        = "DOCKER"
  docker_config {
    immutable_tags = true
  }
}
