"""What a service uses that is no pipeline: ``producer`` sends with a declared durability, ``consumer`` hands records to
a function under a declared guarantee, ``receipts`` says what became of a record that was sent.
"""
