"""Many runs on one store: which there are, in which order they train, and which of them is best."""
