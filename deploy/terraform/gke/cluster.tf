resource "google_container_cluster" "this" {
  name                     = var.name
  location                 = var.zone
  network                  = google_compute_network.this.id
  subnetwork               = google_compute_subnetwork.nodes.id
  remove_default_node_pool = true
  initial_node_count       = 1
  deletion_protection      = var.deletion_protection
  enable_shielded_nodes    = true

  release_channel {
    channel = "STABLE"
  }

  # Calico instead of Dataplane V2, because the policies of deploy/ select the API server by its address, which Cilium does not support.
  datapath_provider = "LEGACY_DATAPATH"
  network_policy {
    enabled  = true
    provider = "CALICO"
  }

  addons_config {
    network_policy_config {
      disabled = false
    }
    gcp_filestore_csi_driver_config {
      enabled = true # Filestore for other claims, such as MLflow's backup
    }
    gcs_fuse_csi_driver_config {
      enabled = true
    }
  }

  ip_allocation_policy {
    cluster_secondary_range_name  = "pods"
    services_secondary_range_name = "services"
  }

  private_cluster_config {
    enable_private_nodes    = true
    enable_private_endpoint = false
    master_ipv4_cidr_block  = "10.40.0.0/28" # `api-servers` of site.yaml
  }

  master_authorized_networks_config {
    gcp_public_cidrs_access_enabled = false # otherwise, virtual machines of other customers could reach the API server
    dynamic "cidr_blocks" {
      for_each = var.administrator_networks
      content {
        display_name = cidr_blocks.key
        cidr_block   = cidr_blocks.value
      }
    }
  }

  workload_identity_config {
    workload_pool = "${var.project}.svc.id.goog"
  }

  # Settings of the default pool, which exists until the other pools are created.
  node_config {
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
  }

  lifecycle {
    ignore_changes = [node_config]
  }
}

# Nodes for MLflow, its database, Kubeflow, the operators, and the steps without accelerators.
resource "google_container_node_pool" "system" {
  name     = "system"
  location = var.zone
  cluster  = google_container_cluster.this.name

  autoscaling {
    min_node_count = 2
    max_node_count = 6
  }

  management {
    auto_repair  = true
    auto_upgrade = true
  }

  node_config {
    machine_type    = "n2-standard-16"
    disk_type       = "pd-balanced"
    disk_size_gb    = 200
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]

    workload_metadata_config {
      mode = "GKE_METADATA"
    }
    shielded_instance_config {
      enable_secure_boot = true
    }
  }
}

# GKE taints nodes with accelerators nvidia.com/gpu=present:NoSchedule, which the tolerations of deploy/ and platform.yaml expect.
resource "google_container_node_pool" "training" {
  name     = "training"
  location = var.zone
  cluster  = google_container_cluster.this.name

  autoscaling {
    min_node_count = 0
    max_node_count = var.training_pool.max_nodes
  }

  management {
    auto_repair  = true
    auto_upgrade = true
  }

  node_config {
    machine_type    = var.training_pool.machine_type
    spot            = var.training_pool.spot
    disk_type       = "pd-ssd"
    disk_size_gb    = 500
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    labels          = { "node.example/model" = "training", "nvidia.com/gpu.present" = "true" }

    guest_accelerator {
      type  = var.training_pool.accelerator
      count = var.training_pool.accelerators
      gpu_driver_installation_config {
        gpu_driver_version = "LATEST"
      }
    }
    ephemeral_storage_local_ssd_config {
      local_ssd_count = var.training_pool.local_ssd_volumes
    }
    gvnic {
      enabled = true
    }
    workload_metadata_config {
      mode = "GKE_METADATA"
    }
    shielded_instance_config {
      enable_secure_boot = true
    }
  }
}

resource "google_container_node_pool" "serving" {
  name     = "serving"
  location = var.zone
  cluster  = google_container_cluster.this.name

  autoscaling {
    min_node_count = 0
    max_node_count = var.serving_pool.max_nodes
  }

  management {
    auto_repair  = true
    auto_upgrade = true
  }

  node_config {
    machine_type    = var.serving_pool.machine_type
    disk_type       = "pd-balanced"
    disk_size_gb    = 500 # for two versions of a package
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    labels          = { "node.example/role" = "serving" }

    guest_accelerator {
      type  = var.serving_pool.accelerator
      count = 1
      gpu_driver_installation_config {
        gpu_driver_version = "LATEST"
      }
    }
    workload_metadata_config {
      mode = "GKE_METADATA"
    }
    shielded_instance_config {
      enable_secure_boot = true
    }
  }
}
