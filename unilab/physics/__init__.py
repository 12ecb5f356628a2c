"""Physics backends and the packed row they exchange with the learner."""
