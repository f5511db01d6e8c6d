resource "google_compute_network" "this" {
  name                    = var.name
  auto_create_subnetworks = false
}

resource "google_compute_subnetwork" "nodes" {
  name                     = "${var.name}-nodes"
  region                   = var.region
  network                  = google_compute_network.this.id
  ip_cidr_range            = "10.10.0.0/22"
  private_ip_google_access = true # access to the bucket and the image repository without public addresses

  secondary_ip_range {
    range_name    = "pods"
    ip_cidr_range = "10.20.0.0/16"
  }
  secondary_ip_range {
    range_name    = "services"
    ip_cidr_range = "10.30.0.0/20"
  }
}

# Nodes have no public addresses. Connections to a model hub or a git server use this NAT, if the NetworkPolicies of deploy/ allow them.
resource "google_compute_router" "this" {
  name    = var.name
  region  = var.region
  network = google_compute_network.this.id
}

resource "google_compute_router_nat" "this" {
  name                               = var.name
  region                             = var.region
  router                             = google_compute_router.this.name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}

# Cloud Storage at four fixed addresses, which a NetworkPolicy can select (`site-network` of site.yaml); its public addresses change.
resource "google_dns_managed_zone" "storage" {
  name        = "${var.name}-storage"
  description = "Cloud Storage through private.googleapis.com"
  dns_name    = "storage.googleapis.com."
  visibility  = "private"
  private_visibility_config {
    networks {
      network_url = google_compute_network.this.id
    }
  }
}

resource "google_dns_record_set" "storage" {
  for_each     = toset(["", "*."])
  managed_zone = google_dns_managed_zone.storage.name
  name         = "${each.key}${google_dns_managed_zone.storage.dns_name}"
  type         = "A"
  ttl          = 300
  rrdatas      = ["199.36.153.8", "199.36.153.9", "199.36.153.10", "199.36.153.11"]
}
