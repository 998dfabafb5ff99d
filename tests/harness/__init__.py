"""What the tests share: a real pair of services of their own, and their own look at what is left behind."""
