"""Looking at what the compiler did: reports, and pages to read them in."""
