"""What is seen of a job: raw objects of the API become facts, facts signs, and signs the standing of each rollout."""
