"""What the system does, shown in minutes: the demo, and an application whose best model turns bad."""
