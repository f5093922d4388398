"""What all pods of a job share: template, placement, containers, code volumes."""
