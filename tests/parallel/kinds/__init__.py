"""The kinds of model that people train, each with its batches; what every layout has to compute, or to refuse."""
