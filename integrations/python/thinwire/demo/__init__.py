"""`thinwire demo`: trains one model with several ways of exchanging gradients and compares them."""
