"""How the bundled model is made: `python -m kvgraft.testbed.training`, from scratch, on two CPU cores.

curriculum   what each stage of training reads
batches      texts with many questions, and the labels of their answers
mimetic      starting weights that already look for things
by_head      the model by head: the same, trained on with local heads
trainer      the loop: two processes, checkpoints, progress
export       the Hugging Face directory, tokenizer and chat template included
"""
