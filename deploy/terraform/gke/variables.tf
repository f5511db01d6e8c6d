variable "project" {
  description = "ID of the project, with the APIs compute, container, dns, file, iam, storage and artifactregistry enabled."
  type        = string
}

variable "region" {
  description = "Region of the network, the bucket and the image repository."
  type        = string
  default     = "europe-west4"
}

variable "zone" {
  description = "Zone of the cluster and of Filestore. It must offer the accelerators. Training nodes and the volume are in the same zone."
  type        = string
  default     = "europe-west4-b"
  validation {
    condition     = startswith(var.zone, "${var.region}-")
    error_message = "The zone must be in the region."
  }
}

variable "name" {
  description = "Name of the cluster and prefix of the other names."
  type        = string
  default     = "tuneline"
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{2,19}$", var.name))
    error_message = "The name must have 3 to 20 lower-case letters, digits and hyphens and begin with a letter."
  }
}

variable "administrator_networks" {
  description = "Networks that can reach the API server, as name: CIDR."
  type        = map(string)
  validation {
    condition     = alltrue([for cidr in values(var.administrator_networks) : can(cidrhost(cidr, 0)) && !endswith(cidr, "/0")])
    error_message = "Each network must be a CIDR block, but not the whole internet."
  }
}

variable "teams" {
  description = "Namespaces of the overlay or the chart whose runs use the bucket."
  type        = set(string)
  default     = ["team-a"]
}

variable "training_pool" {
  description = "Nodes for training. The machine type determines a node's accelerators."
  type = object({
    machine_type      = string
    accelerator       = string
    accelerators      = number
    max_nodes         = number
    local_ssd_volumes = number
    spot              = bool
  })
  default = {
    machine_type      = "a3-highgpu-8g"
    accelerator       = "nvidia-h100-80gb"
    accelerators      = 8
    max_nodes         = 2
    local_ssd_volumes = 16
    spot              = false
  }
}

variable "serving_pool" {
  description = "Nodes for serving, one accelerator each."
  type = object({
    machine_type = string
    accelerator  = string
    max_nodes    = number
  })
  default = {
    machine_type = "g2-standard-16"
    accelerator  = "nvidia-l4"
    max_nodes    = 4
  }
}

variable "filestore" {
  description = "Shared volume for checkpoints, store and state. ZONAL and REGIONAL volumes can grow and support snapshots; the throughput depends on the capacity."
  type = object({
    tier        = string
    capacity_gb = number
  })
  default = {
    tier        = "ZONAL"
    capacity_gb = 10240
  }
  validation {
    condition     = contains(["ZONAL", "REGIONAL"], var.filestore.tier) && var.filestore.capacity_gb >= 1024
    error_message = "The tier must be ZONAL or REGIONAL, and the capacity at least 1024 GB."
  }
}

variable "deletion_protection" {
  description = "Refuse to delete the cluster, the volume and a bucket with objects."
  type        = bool
  default     = true
}
