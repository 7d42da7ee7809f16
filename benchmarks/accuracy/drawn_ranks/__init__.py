"""Trainings of one rank of many, drawn at random: what they are, how they are drawn, and how they are measured."""
