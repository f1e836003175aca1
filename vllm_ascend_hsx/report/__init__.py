"""What holds on this machine: the steps of `hsx hardware-report` and the report that they make."""
