terraform {
  required_version = ">= 1.5"

  required_providers {
    nebius = {
      source  = "nebius/nebius"
      version = "~> 0.6"
    }
  }
}

# Credentials come from the environment: NB_SA_ID, NB_AUTHKEY_PUBLIC_ID, NB_AUTHKEY_PRIVATE_PATH.
provider "nebius" {
  service_account = {
    account_id_env       = "NB_SA_ID"
    public_key_id_env    = "NB_AUTHKEY_PUBLIC_ID"
    private_key_file_env = "NB_AUTHKEY_PRIVATE_PATH"
  }
}
