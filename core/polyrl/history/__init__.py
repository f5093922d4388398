"""What a run leaves to be read, live or ended, wherever it is kept: files of a run's folder, or a manager's memory.

rows          the trainer's numbers of each step and each evaluation
fleet         what happened to workers, and when; how long each was there
results       what was learned, from the trainer's rows
losses        rollouts that were taken away, and what each cost
cost          money, from how long machines were held and what they cost per hour
model_card    what lies beside a trained model's weights
foreign_text  texts of models, data and user code, made harmless for whoever shows them
"""
