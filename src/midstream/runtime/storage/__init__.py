"""Files of checkpoints and sinks, on local disks and in object stores."""
