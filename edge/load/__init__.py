"""Open-loop load: requests that come at times fixed beforehand, whether the answers keep up or not.

Clients that wait for each other ask for less as soon as the server is slow, and hide what an overload does. Here every
latency counts from when its request was due, so neither the server nor the generator can hide a delay.
"""
