"""The suite: plans matrices of training runs, measures them from their events, and renders verifiable reports."""
