"""What a trained model knows, as benchmarks ask for it: likelihoods of given texts (likelihood.py), shared out over
copies of the model (replicas.py), and the model class of lm-eval on top of them (lm.py, needs the extra `eval`)."""

AUTO, EXACT, BOUND = LIKELIHOODS = ("auto", "exact", "bound")
"""What `--likelihood` may ask for; auto is exact where a model has that."""
