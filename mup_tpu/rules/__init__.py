"""Rules: how init, learning rate, weight decay, ε and the forward pass follow the scales of a trial."""
