"""Access control: credentials in; a caller with roles and a tenant out, or a denial with a reason.

    authoriser    identifies the caller, and decides whether it may make the call
    tokens        JSON Web Tokens: signature, issuer, audience, times
    grants        what keys and certificates allow, as lines of a file
    roles         each method of each service belongs to one role
    caller        a client, operator, worker or front

These are pure: no I/O, and time is an argument. Their shells own the files and the settings:

    guard         reads everything below when it changes, and has the authoriser use it
    key_file      the file of keys, which `clockwright keys` writes
    authorities   files of certificates that sign others
    issuing       certificates of a private authority, which `clockwright certs` makes
    issuer_keys   the keys of an issuer of tokens, from a file or a URL
    config        settings

All servers (gRPC, REST, metrics) ask one authoriser, once per caller: they cache the caller by its credentials as long as
`Caller.over` is false. Each server finds the credentials itself: in headers, or in a TLS certificate.
"""
