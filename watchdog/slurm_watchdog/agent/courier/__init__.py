"""The courier: the one process of a node with a network, and with nothing else"""
