"""Who may do what: credentials in; a caller with roles and a tenant out, or a refusal that has a name.

    authoriser    finds out who calls, and whether the caller may
    tokens        JSON Web Tokens: signature, issuer, audience, times
    grants        what keys and certificates allow, as lines of a file
    roles         each method of each service belongs to one role
    caller        somebody who calls

These are pure: no I/O, and time is an argument. Their shells own the files and the settings:

    guard         reads everything below when it changes, and has the authoriser use it
    key_file      the file of keys, which `clockwright keys` writes
    authorities   files of certificates that sign others
    issuer_keys   the keys of an issuer of tokens, from a file or a URL
    config        settings

Every door asks one authoriser, once per caller: a door keeps the caller with what it was found by, as long as
`Caller.over` is false. What is a door's own is where credentials stand: in headers, or in a certificate of TLS.
"""
