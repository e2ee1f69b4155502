"""What the operator files share: the record, its traits, call forms, type promotion, weighted sums, composites and user operators."""
