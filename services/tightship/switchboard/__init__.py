"""The I/O switchboard: owns the near ends of containers' streams, their leases and their bytes."""
