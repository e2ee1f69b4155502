"""Turn an operator into integer primitives: once for training, as values (`eager`), and once for deployment, as a graph (`lowering`)."""
