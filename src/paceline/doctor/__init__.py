"""What this machine has, whether ranks can run and talk on it, and what to do where they cannot."""
