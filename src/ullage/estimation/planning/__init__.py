"""On how many GPUs, and spread how, a job fits, and what is fastest (`ullage.plan`).

asking      the question
clusters    the GPUs to plan for
filling     estimates the rows, several at once
result      the rows, and the table of them
"""
