"""Parts that the operator files share: the record, its traits, call forms, promotion, weighted sums, composites and user operators."""
