"""Who is who between agents and controller: certificates, MUNGE, and the files that hold secrets."""
