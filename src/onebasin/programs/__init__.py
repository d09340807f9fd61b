"""The operations of a module as a program that can be replayed: recorded while the module runs, or exported."""
