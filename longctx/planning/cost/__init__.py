"""The cost model: the modelled time of a plan on given hardware, and lower bounds on the time of
any plan."""
