project                = "my-project"
region                 = "europe-west4"
zone                   = "europe-west4-b"
administrator_networks = { office = "198.51.100.0/24" }
teams                  = ["team-a", "team-b"]
