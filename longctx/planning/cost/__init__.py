"""The cost model: what a plan takes by a hardware profile, and what no plan can beat."""
