"""Tables, timelines, drawings and pages for people, made from artifacts."""
