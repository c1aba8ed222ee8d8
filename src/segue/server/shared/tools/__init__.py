"""Tool calls: what a request says about tools, and reading calls out of a model's text while it comes."""
