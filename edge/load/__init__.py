"""Open-loop load: requests come at times fixed beforehand, whether or not responses keep up.

Clients that wait for each response send less as soon as the server slows down, which hides the overload. Here latency
counts from when a request was due, so no delay of the server or of the generator is hidden.
"""
