"""Constants of a hardware profile from measured times."""
