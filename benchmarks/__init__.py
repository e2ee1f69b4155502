"""Each file asks one question, runs with one command and prints one table."""
