"""States of models: dictionaries of tensors, held or lazy, mixed, saved."""
