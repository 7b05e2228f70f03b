"""DueMQ's services: nameserver, broker and timer service, and what runs and measures them here.

Each package is a folder at the top of the repository; the links beside this file give it its name.
"""

__version__ = "0.1.0"
