"""Analysis of models: why a node is integer, what a target allows, where two forms differ, and graphs as text."""
