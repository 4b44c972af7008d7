"""Flash attention, one schedule for each kind of chip."""
