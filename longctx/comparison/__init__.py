"""The same documents under several ways of planning: modelled, measured, and by split of a run's GPUs."""
