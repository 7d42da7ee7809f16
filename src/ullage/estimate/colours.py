"""The colour of each part of the breakdown: the same in the terminal, in a notebook and on the timeline page."""

BREAKDOWN_COLOURS = {
    "parameters": "#3b7dd8",
    "gradients": "#2fa36b",
    "optimizer": "#e8a33d",
    "activations": "#8e6bd1",
    "workspace": "#d1637d",
    "fragmentation": "#a3adba",
    "context": "#6f7c8e",
}
