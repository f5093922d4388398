"""Agents of one run that give each other chunks of weights.

swarm       this agent among the others: its key, who is let in, whom it may dial
shelf       what it can give
server      gives it, within bounds
streams     asks others for what is missing here
offers      has others ask this agent where nobody can dial it

Who is asked for what is decided by `polyrl.weights.fetch_plan`, whom to dial by `polyrl.weights.neighbours`.
"""
