"""How the bundled model is made: `python -m research.testbed`, from scratch, on two CPU cores.

curriculum   what each stage of training reads
batches      texts with many questions, and the labels of their answers
mimetic      starting weights that already look for things
trainer      the loop: two processes, checkpoints, progress
export       the Hugging Face directory, tokenizer and chat template included
"""
