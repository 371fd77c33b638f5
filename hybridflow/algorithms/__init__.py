"""The algorithms, as pure functions on tensors. Where to find what:

advantages.py    every advantage estimator, from scores or token rewards
losses.py        every policy loss, and the value loss
objective.py     from one number per token to the scalar of an update
kl.py            KL estimators, KL in the reward, coefficients
correction.py    off-policy weights and rejection
distill.py       on-policy distillation
filters.py       dynamic sampling, overlong filter and penalty
safety.py        rewards against costs
preferences.py   Bradley-Terry, DPO
evaluation.py    pass@k, majority
metrics.py       what a batch says about the run
step.py          the driver's advantage step: applies the configured ones to a batch's columns
masked.py        masked sums, whitening, statistics of groups
"""
