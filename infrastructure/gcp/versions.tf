terraform {
  required_version = ">= 1.5"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 7.0"
    }
  }
}

# Credentials come from the environment: gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS.
provider "google" {
  project = var.project
  region  = var.region
  zone    = var.zone
}
